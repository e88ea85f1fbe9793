"""What only a GPU can prove, in minutes: see ``scripts/gpu_check`` and docs/gpu.md."""
