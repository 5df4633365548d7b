"""Commands of the tools: ``autopar plan | verify | rehearse | trace | policy``."""
