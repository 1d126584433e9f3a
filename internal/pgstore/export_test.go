package pgstore

// RecordsSQL is shown to the tests that look at its plan.
const RecordsSQL = recordsSQL
