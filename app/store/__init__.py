"""One module a table family; each function runs one SQL statement, takes the connection first and never commits."""
