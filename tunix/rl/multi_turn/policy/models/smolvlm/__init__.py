"""SmolVLM and Idefics3: their inputs; the decoder is shared."""
