//! The report as text: a line per kernel, gate and control, and the sum of them.

use std::fmt;

use super::Line;

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} | {} | {}", self.device.name(), self.kernel, self.gate.name())?;
        match (self.control, &self.outcome) {
            (None, Ok(covered)) => write!(f, " | green: {covered} ({:.1} s)", self.seconds),
            (None, Err(fault)) => write!(f, " | RED: {fault}"),
            (Some(control), Ok(covered)) if !control.breaks() => {
                write!(f, " | controls' image without a fault green: {covered}")
            }
            (Some(control), Err(fault)) if !control.breaks() => {
                write!(f, " | controls' image without a fault RED: {fault}")
            }
            (Some(control), Err(fault)) => write!(f, " | control {} red: {fault}", control.name()),
            (Some(control), Ok(_)) => write!(f, " | control {} STAYED GREEN", control.name()),
        }
    }
}

/// What a run's lines add up to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    green: usize,
    red: usize,
    controls: usize,
    blind: usize,
}

impl Sum {
    /// Counts one line.
    pub fn take(&mut self, line: &Line) {
        match (line.control.is_some_and(super::Control::breaks), line.as_it_should_be()) {
            (false, true) => self.green += 1,
            (false, false) => self.red += 1,
            (true, true) => self.controls += 1,
            (true, false) => self.blind += 1,
        }
    }

    /// Every gate green and every control red.
    pub fn holds(&self) -> bool {
        self.red + self.blind == 0
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { green, red, controls, blind } = self;
        write!(
            f,
            "{green} gates green, {red} red; {controls} controls red as they must, {blind} stayed green"
        )
    }
}
