"""The load client: requests of each API, answers as they stream in, and what a server says of itself."""
