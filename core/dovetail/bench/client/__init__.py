"""Send the requests of each API, read the streamed answers, and read what a server reports about itself."""
