"""Problems: where they come from, in which order, and how they become prompts."""
