"""Problems: data sources, training order, prompts and tools that clean data sets."""
