"""Small configs and inputs of the model types that policies list, one module per family. ``form`` says how."""
