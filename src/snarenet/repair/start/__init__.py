"""Where the repair begins: at the prediction, or nearer to the set; `nearest` chooses how."""
