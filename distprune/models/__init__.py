"""What a model is made of: decoder blocks, linear layers, experts; and which parameters to prune. No communication."""
