"""The schema of a database, read from Postgres's catalogs, so that two schemas can be compared in full."""

from app.database.connection import Connection

# Every kind of thing that the tables' definition can differ in, as text; partitions of days are rows of the day table,
# not of the schema.
QUESTIONS = {
    "tables": """
        select c.relname, c.relkind, c.relpersistence, c.reloptions, pg_get_partkeydef(c.oid) from pg_class c
        where c.relkind in ('r', 'p', 'v', 'm') and not c.relispartition and c.relnamespace = 'public'::regnamespace""",
    "columns": """
        select c.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
          a.attgenerated, a.attstorage, a.attcompression, a.attcollation::regcollation::text,
          pg_get_expr(d.adbin, d.adrelid)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relkind in ('r', 'p') and not c.relispartition and c.relnamespace = 'public'::regnamespace
          and a.attnum > 0 and not a.attisdropped""",
    "constraints": """
        select c.relname, k.conname, k.contype, pg_get_constraintdef(k.oid) from pg_constraint k
        join pg_class c on c.oid = k.conrelid
        where not c.relispartition and c.relnamespace = 'public'::regnamespace and k.contype <> 't'""",
    "indexes": """
        select c.relname, pg_get_indexdef(c.oid), c.reloptions from pg_class c
        where c.relkind in ('i', 'I') and not c.relispartition and c.relnamespace = 'public'::regnamespace""",
    "sequences": """
        select c.relname, s.seqtypid::regtype::text, s.seqstart, s.seqincrement, s.seqcache, s.seqcycle
        from pg_sequence s join pg_class c on c.oid = s.seqrelid where c.relnamespace = 'public'::regnamespace""",
    "others": """
        select p.proname, 'function' from pg_proc p where p.pronamespace = 'public'::regnamespace
        union all select t.tgname, 'trigger' from pg_trigger t where not t.tgisinternal
        union all select t.typname, 'type' from pg_type t
          where t.typnamespace = 'public'::regnamespace and t.typtype not in ('c', 'b')""",
}


async def schema_of(db: Connection, *, without: str = "alembic_version") -> dict[str, list[str]]:
    """Return the schema as sorted lines of text by kind, without one table."""
    found = {}
    for kind, question in QUESTIONS.items():
        rows = [repr(tuple(row)) for row in await db.fetch(question)]
        found[kind] = sorted(row for row in rows if without not in row)
    return found
