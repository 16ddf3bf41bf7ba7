//! The program as users run it: commands, results, and errors on bad input.

mod bad_input;
mod chat;
mod commands;
mod doctor;
mod exceptions;
mod export;
mod forward_metrics;
mod generate;
mod hostile;
mod inspect;
mod kill;
mod layer_axes;
mod monitor;
mod parts;
mod pipeline;
mod preferences;
mod rank_faults;
mod ranks;
mod runs;
mod serve;
mod setup;
mod signals;
mod soak;
mod soak_attack;
mod streams;
mod tutorial;
