"""Programs on several devices: a batch split among them, or the layers of a model."""
