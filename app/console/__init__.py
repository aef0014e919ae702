"""The console: server-rendered pages for people, over the functions of the API's routes."""
