//! Brokers joined in memory: simulated time, network, data planes and engines.
//!
//! [`storm`] runs thousands of seeds under the invariants that [`ledger`] and [`data`] keep; the other modules have a
//! test for each rule. Both were tried against brokers that were broken on purpose. Some of them, and what caught each:
//!
//! | broken | caught by |
//! |---|---|
//! | a fetch is reported before its jobs are closed | bytes written to a page that nothing holds (`check_touched`) |
//! | a publish is reported before its jobs are closed | bytes read from a page that nothing holds |
//! | the receiver's bitmap is not looked at | a job that writes a byte twice (`DataPlane::write`) |
//! | a fetch is delivered before its bytes landed, or chunks are sent before they are ready | wrong bytes (`check_delivered`) |
//! | a publish is delivered when the first decode rank has its part | `Storm::check_ends` |
//! | a fetch that fails does not close its jobs | a transfer that is open for too long (`check_bound`) |
//! | regions are let go while transfers are open | a region released under held pages (`released`) |
//! | an end is told twice | an end after an end (`saw_event`) |
//! | a failed rank's siblings are not told | `ending`: the others fail at the deadline instead of at once |
//! | nobody asks again | `waiting`: one lost message fails a transfer |
//! | messages of another life are acted on | `ending::messages_of_another_life_are_not_acted_on` |

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod attaching;
mod bounds;
mod causes;
mod coverage;
mod data;
mod ending;
mod engines;
mod geometry;
mod hostile;
mod insisting;
mod ledger;
mod linking;
mod meeting;
mod reporting;
mod scene;
mod serving;
mod sim;
mod storm;
mod waiting;
mod wire;
mod writing;
