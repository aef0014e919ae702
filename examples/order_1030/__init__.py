"""Order 1030, announced in four ways while every process is killed: `make demo-compare`."""
