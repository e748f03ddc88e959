"""Vision towers: their shapes, and the operators that encode images and videos."""
