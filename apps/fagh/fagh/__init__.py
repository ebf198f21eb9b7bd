"""Newton's direction from one Hessian row, beside other methods of many rounds."""
