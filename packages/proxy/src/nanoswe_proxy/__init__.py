"""Chat in, tokens out, every token remembered. Start reading at `session` and `app`."""
