"""Small configs and inputs of the model types that policies list: data, one YAML file per family."""
