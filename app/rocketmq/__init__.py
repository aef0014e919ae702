"""The gateway for RocketMQ's clients, on Halfnote's HTTP API.

RocketMQ 5: `apache.rocketmq.v2.MessagingService` over gRPC. RocketMQ 4: remoting, in the folder of that name.

It is a process of its own (`halfnote rocketmq`) and uses only what every client of the HTTP API may use.
"""
