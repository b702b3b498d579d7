#!/bin/sh
# Makes and updates Temporal's tables; may run again at any time.
set -eu
export SQL_PASSWORD="$POSTGRES_PWD"
schemas=/etc/temporal/schema/postgresql/v12

prepare() { # database, schema
    tool="temporal-sql-tool --plugin postgres12 --ep $POSTGRES_SEEDS --port $DB_PORT --user $POSTGRES_USER --database $1"
    # Both refuse to run twice; what counts is that the update below succeeds.
    $tool create-database || echo "database $1 exists"
    $tool setup-schema -v 0.0 || echo "schema of $1 exists"
    $tool update-schema -d "$schemas/$2/versioned"
}

prepare temporal temporal
prepare temporal_visibility visibility
