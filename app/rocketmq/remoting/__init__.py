"""The gateway for RocketMQ 4 clients: their remoting protocol, with the name server and the broker in one."""
