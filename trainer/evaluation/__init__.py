"""What a trained SAE is worth: figures over rows it was not trained on, with their errors, and a card of them."""
