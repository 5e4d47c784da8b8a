"""The only assembler: sources x policy x algorithm in one loop (layer L4)."""
