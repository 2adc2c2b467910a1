"""Media: one prober, one decoder and one writer, all through ffmpeg; checks, comparison and contact sheets of clips."""
