"""Qwen2-VL to Qwen3.5, GLM-4.1V and 4.5V; text models of Qwen and Llama."""
