"""The embedded engine; the protocol it serves is nanoswe_proxy.engine.base."""
