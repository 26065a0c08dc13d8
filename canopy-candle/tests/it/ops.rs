//! Every op against the float64 oracle, and the same bits from every layout of its arguments: what lies around a
//! view is NaN, so one element read outside it shows.

mod attention;
mod gdn;
mod gdn_serial;
mod glue;
mod linear;
mod prefill;
mod rest;
