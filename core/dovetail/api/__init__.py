"""What an API plugin builds from: ``body`` reads and validates requests, ``requests`` has what their fields have in common,
``sampling`` those that say how tokens are chosen, ``responses`` answers whole or streamed, ``problems`` are the errors, ``meta``
is how SGLang's API tells of an output."""
