"""Order 1030, announced in four ways while everything that can die dies: `make demo-compare`."""
