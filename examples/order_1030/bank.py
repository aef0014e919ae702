"""Bank A: debits an account and sends a message to bank B, which credits an account. The sum must not change."""

from typing import Any

from fastapi import FastAPI, Request
from halfnote import Outgoing
from pydantic import BaseModel

from examples.order_1030.service import Options, Service

AMOUNT, CAPITAL = 10_000, 10_000_000
RICH, POOR = "anna", "ada"

# The tables of both banks. The account in bank B starts empty.
ACCOUNTS = "create table account (name text primary key, amount bigint not null check (amount >= 0));"
SCHEMA = f"""
{ACCOUNTS}
insert into account values ('{RICH}', {CAPITAL}), ('{POOR}', 0);
create table transfers (number int primary key, account text not null references account, amount int not null);
"""  # noqa: S608 - numbers and names of ours
SCHEMA_B = f"{ACCOUNTS} insert into account values ('ben', 0);"  # noqa: S608 - as above


class Transfer(BaseModel):
    """A transfer of an amount from an account in bank A to the one in bank B."""

    number: int
    account: str
    amount: int


def create_app(options: Options) -> FastAPI:
    """Return bank A's HTTP: customers post /transfers; Halfnote asks at /halfnote/check."""
    service = Service(options)

    @service.app.post("/transfers", status_code=201)
    async def transfer(transfer: Transfer, request: Request) -> dict[str, int]:
        async def write(connection: Any) -> None:
            debit = "update account set amount = amount - $2 where name = $1"
            await connection.execute(debit, transfer.account, transfer.amount)
            note = "insert into transfers values ($1, $2, $3)"
            await connection.execute(note, transfer.number, transfer.account, transfer.amount)

        message = Outgoing(options.group, transfer.model_dump(), key=f"transfer-{transfer.number}")
        await service.announce(request, message, write)
        return {"number": transfer.number}

    return service.app
