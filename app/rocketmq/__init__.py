"""The gateway for RocketMQ 5 clients: `apache.rocketmq.v2.MessagingService` over gRPC, on Halfnote's HTTP API.

It is a process of its own (`halfnote rocketmq`) and uses only what every client of the HTTP API may use.
"""
