"""Fine-tuning methods: full, LoRA, linear probe, and what each trains."""
