"""The relay: reads the outbox log and delivers messages to subscriptions."""
