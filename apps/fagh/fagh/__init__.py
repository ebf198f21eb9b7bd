"""FAGH, Newton's direction from one Hessian row, and other methods with many rounds."""
