"""Moving weights between engines: a plan of slices, and executors that carry it out."""
