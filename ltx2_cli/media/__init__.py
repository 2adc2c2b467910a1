"""Media through ffmpeg: probed, decoded and written; checks, comparison and contact sheets of clips."""
