"""The model card of an export: what the files of a run say of its model, fit to be published."""
