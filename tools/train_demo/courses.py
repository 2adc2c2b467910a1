"""How long each network is trained, and how fast."""

from tools.train_demo.training import Course

COURSES = {
    course.name: course
    for course in (
        Course("pieces", steps=1200, rate=1e-3, warm_up=100, average=0.995),
        Course("frames", steps=500, rate=7e-4, warm_up=20, average=0.99),
        Course("moving", steps=500, rate=1e-3, warm_up=20, average=0.99),
        Course("video_vae", steps=900, rate=7e-4, warm_up=20, average=0.99),
        Course("decoder", steps=3000, rate=1e-3, warm_up=20, average=0.995),
        Course("large", steps=1000, rate=5e-4, warm_up=30, average=0.99),
        Course("audio_vae", steps=1500, rate=1e-3, warm_up=100, average=0.995),
        Course("vocoder", steps=800, rate=1e-3, warm_up=100, average=0.99, own_code=False),
        Course("upsampler", steps=2000, rate=1e-3, warm_up=100, average=0.995),
        Course("denoiser", steps=7000, rate=2e-3, warm_up=300, average=0.999),
        Course("both_sizes", steps=300, rate=5e-4, warm_up=20, average=0.995),
        Course("brief", steps=650, rate=7e-4, warm_up=50, average=0.995),
        Course("continued", steps=1200, rate=6e-4, warm_up=30, average=0.995),
    )
}
