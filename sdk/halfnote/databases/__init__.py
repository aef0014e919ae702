"""The databases of producers and consumers, each behind the same small interface; one module a driver.

`dbapi` (psycopg, PyMySQL, mysqlclient, sqlite3 and the like), `sqlalchemy`, `asyncpg`, `psycopg` (asynchronous) and
`django`. None is imported unless it is used.
"""
