"""GUI-action grammars of Qwen's models, and BrowserGym's for trees of pages."""
