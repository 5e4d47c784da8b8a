"""Vision-language-action policies."""
