"""mattermill: recipes of simulation stages over thousands of structures, decomposed over every rank you have."""
