"""The policy sharded over processes with FSDP2."""
