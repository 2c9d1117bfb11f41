"""Who has which documents in the pool.

In: a request's documents by content key. Out: a lease of them (`leases.Lease`), for which `manager.PICManager` has made
room, waited its turn (`leases.WaitQueue`) and asked an encoder. Segments that nobody has marked are compiled when they
come again (`sightings`). What happened is counted (`counters`) and shown by the API.
"""
