"""What an API plugin builds from: ``body`` reads and validates requests, ``requests`` has what their fields have in common,
``responses`` answers whole or streamed, ``problems`` are the errors, ``meta`` is how SGLang's API tells of an output."""
