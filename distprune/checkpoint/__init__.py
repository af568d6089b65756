"""On disk: Hugging Face directories in and out, without any rank holding the model."""
