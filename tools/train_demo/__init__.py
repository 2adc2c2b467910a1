"""How the embedded model is trained, from nothing: `python -m tools.train_demo --out FOLDER`."""
