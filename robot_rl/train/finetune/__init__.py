"""Fine-tuning on a dataset: whole episodes held out, two baselines, one loop. Start in `run`."""
