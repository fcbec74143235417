"""The agents: `nano`, `oracle`, `nop`."""
