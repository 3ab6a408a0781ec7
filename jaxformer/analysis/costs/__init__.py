"""What each kind of attention computes and stores, as formulas over sizes; one file a family."""
