"""Reading and writing policies: safetensors, GGUF, adapters, tokenizers."""
